"""Small kernels around the products: of each the host side in a file of its name, the device code in device/."""
