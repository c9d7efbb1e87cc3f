"""What the Triton operators share: launching, ahead-of-time compilation, the step that is made of them, CUDA graphs."""
