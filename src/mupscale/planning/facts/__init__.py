"""What is known about two models without measuring: roles of torch's modules, padded norms, axes that nothing writes.

Imports models, plans and the draft. Runs no loss.
"""
