"""Single PTX instructions as functions of device code: what decoders and kernels are written in."""
