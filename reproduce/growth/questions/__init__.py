"""What is asked of the bench: each file names the arms of one question and the runs that choose and report them."""
