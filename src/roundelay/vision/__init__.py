"""Image classification: Fashion-MNIST, and ImageNet as in the first paper."""
