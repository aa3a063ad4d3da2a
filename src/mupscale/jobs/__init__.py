"""A wide checkpoint as a job: cut into units, written by any number of workers, resumed, checked bit for bit."""
