"""What a sample is: the stateless work on text and images. Found by the core through entry points."""
