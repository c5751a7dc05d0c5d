"""One worker's model on its island: on one rank, by DDP or by FSDP2; gradient norms; layers."""
