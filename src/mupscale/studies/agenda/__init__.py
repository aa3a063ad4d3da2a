"""What a study has to do: its points, the legs that are open, and what both sweeps will cost."""
