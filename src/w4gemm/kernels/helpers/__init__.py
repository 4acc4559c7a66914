"""Small kernels around the products: host sides here, together where one caller launches them; the device code of each
in device/, in a file of its name."""
