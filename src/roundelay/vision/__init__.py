"""Image classification: the ImageNet side of the first paper."""
