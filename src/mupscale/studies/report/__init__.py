"""A page about tuning studies: what is known of them, drawn and written down."""
