"""What tests of `terrace train` train: a model that takes no time, with room for all of it or most of it on NVMe."""

TINY = """
[device]
memory = "8MiB"
[host]
memory = "16MiB"
[model]
layers = 2
heads = 2
width = 64
sequence = 32
[train]
micro_batch = 2
accumulate = 2
"""
ON_NVME = [
    "--set", "host.memory=1536KiB", "--set", "nvme.paths=nvme", "--set", "nvme.memory=64MiB",
    "--set", "placement.parameters={nvme=0.5,host=0.5}", "--set", "placement.optimizer={nvme=1.0}",
    "--set", "placement.chunk=64KiB", "--set", "device.chunks=1MiB",
]
