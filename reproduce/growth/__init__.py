"""Ways of growing on one bench: decayed schedules, tuned rates, equal FLOPs and paired seeds. See `methods/` to add one."""
