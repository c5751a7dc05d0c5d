"""One worker's model on one rank or several: single, DDP, FSDP2; gradient norms; the one module
that knows DTensor.
"""
