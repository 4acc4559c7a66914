"""w4gemm in other libraries: models, adapters, serving engines. Importing this imports none of them."""
