"""Does growing deeper, wider by zeros, or by experts pay: a stock Llama on text, decayed to zero, at equal FLOPs."""
