"""Does it hold? Two models or two runs are compared, and a certificate says what was measured. Widens nothing."""
