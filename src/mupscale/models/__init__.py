"""A live `nn.Module` as it is: names, builds, clones, recorded calls, float64, dropout.

Knows no plan. Imports rules, tensors and files only.
"""
