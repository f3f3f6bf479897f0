"""Code that all operators share: masks, packing, autograd helpers, custom operators of torch."""
