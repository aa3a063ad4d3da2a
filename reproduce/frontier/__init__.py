"""Does growing pay when every run is decayed to zero: MLPs on Forest Cover Type, at equal FLOPs."""
