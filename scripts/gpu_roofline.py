"""Two ceilings of the current CUDA device, measured: memory bandwidth of a copy and the rate of a large product."""

import json
from collections.abc import Callable

import torch


def milliseconds(work: Callable[[], object], repeats: int = 12) -> float:
    """Median of the device's time."""
    times = []
    for _ in range(repeats):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return float(sorted(times[2:])[(repeats - 2) // 2])


def main() -> None:
    source = torch.empty(1 << 31, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = milliseconds(lambda: a @ b)
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tb_s": round(2 * source.nbytes / copy / 1e9, 3),
        "product_tflop_s": round(2 * 8192**3 / product / 1e9, 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
