"""A ResNet-18 on CIFAR-10 (in the place of CIFAR-100), with SGD and momentum."""
