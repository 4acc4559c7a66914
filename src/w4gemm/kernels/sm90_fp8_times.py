TIMES: dict[str, tuple[float, float, float]] = {}
