"""Megatron: its formats torch_dist and fsdp_dtensor, how both grow, and layouts and overrides for a wide job."""
