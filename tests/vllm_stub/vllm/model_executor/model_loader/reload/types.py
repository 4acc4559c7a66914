"""What is known of a layer that is loaded anew."""

from dataclasses import dataclass, field


@dataclass
class LayerReloadingInfo:
    load_numel: int = 0
    load_numel_total: int | None = None
    loaded_weights: list = field(default_factory=list)
    kernel_tensors: tuple | None = None

    def can_load(self):
        return self.load_numel_total is not None
