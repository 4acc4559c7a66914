"""Values that everything else speaks of: formats, epilogues, problems, configs, devices, errors, the environment."""
