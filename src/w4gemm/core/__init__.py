"""The values that all other folders use: formats, epilogues, problems, configs, devices, errors, the environment."""
