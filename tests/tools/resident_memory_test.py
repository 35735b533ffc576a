"""From outside: what a managed run holds in memory and on disk stays within its budgets."""

import os
import re
import subprocess
import tempfile
import threading
import unittest

TERRACE = os.environ["TERRACE_BIN"]
MIB = 1 << 20
DEVICE, HOST, NVME = 160 * MIB, 420 * MIB, 1100 * MIB
SLACK = 64 * MIB


def peak_resident_bytes(arguments, while_running=lambda: None):
    """Runs the command; its peak resident memory as the kernel accounts it."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([TERRACE, *arguments], stdout=output, stderr=subprocess.STDOUT)
        watching = threading.Event()

        def watch():
            while not watching.wait(0.02):
                while_running()

        watcher = threading.Thread(target=watch)
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        watching.set()
        watcher.join()
        output.seek(0)
        text = output.read().decode(errors="replace")
        if process.returncode != 0:
            raise AssertionError(f"exit {process.returncode}: {text}")
        return usage.ru_maxrss * 1024, text


class ResidentMemory(unittest.TestCase):
    def test_stays_within_device_and_host_budgets_and_files_within_nvme(self):
        with tempfile.TemporaryDirectory() as folder:
            data = os.path.join(folder, "text")
            with open(data, "w") as file:
                file.write("".join(f"line {i} of a text to learn\n" for i in range(4000)))
            store = os.path.join(folder, "store")
            largest = {"apparent": 0, "allocated": 0}

            def look_at_store():
                apparent = allocated = 0
                try:
                    for entry in os.scandir(store):
                        status = entry.stat()
                        apparent += status.st_size
                        allocated += status.st_blocks * 512
                except FileNotFoundError:
                    pass
                largest["apparent"] = max(largest["apparent"], apparent)
                largest["allocated"] = max(largest["allocated"], allocated)

            common = ["train", "--data", data, "--set", "train.micro_batch=1", "--set", "model.sequence=64"]
            baseline, _ = peak_resident_bytes(
                common + ["--unmanaged", "--set", "model.layers=1", "--set", "model.width=64", "--set", "train.steps=1"])
            peak, text = peak_resident_bytes(
                common + ["--set", "model.layers=10", "--set", "model.width=768", "--set", "model.heads=12",
                          "--set", "train.steps=3", "--set", f"device.memory={DEVICE // MIB}MiB",
                          "--set", f"host.memory={HOST // MIB}MiB", "--set", f"nvme.memory={NVME // MIB}MiB",
                          "--set", f'nvme.paths=["{store}"]', "--set", "placement.chunk=8MiB"],
                look_at_store)
            state = re.search(r"(\d+) parameters", text)
            self.assertGreaterEqual(int(state.group(1)) * 16, 1 << 30, "the state is too small to prove anything")
            self.assertLessEqual(peak - baseline, DEVICE + HOST + SLACK,
                                 f"peak {peak / MIB:.0f} MiB, baseline {baseline / MIB:.0f} MiB")
            self.assertGreater(largest["apparent"], 0, "the store was not seen")
            self.assertLessEqual(largest["apparent"], NVME)
            self.assertLessEqual(largest["allocated"], NVME)
            print(f"peak {peak / MIB:.0f} MiB less baseline {baseline / MIB:.0f} MiB: "
                  f"{(peak - baseline) / MIB:.0f} MiB of {(DEVICE + HOST + SLACK) / MIB:.0f} MiB allowed; "
                  f"store {largest['apparent'] / MIB:.0f} of {NVME / MIB:.0f} MiB")


if __name__ == "__main__":
    unittest.main(verbosity=2)
