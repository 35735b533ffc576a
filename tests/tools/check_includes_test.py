"""tools/check_includes finds each kind of include that points the wrong way, and nothing else."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CHECK = Path(__file__).resolve().parents[2] / "tools" / "check_includes"


def check(files):
    """Runs the check on a tree of {path: text}. Returns the exit code and what it printed."""
    with tempfile.TemporaryDirectory() as root:
        for path, text in files.items():
            file = Path(root, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        run = subprocess.run([sys.executable, "-B", CHECK, root], stdout=subprocess.PIPE, text=True, check=False)
        return run.returncode, run.stdout


class CheckIncludes(unittest.TestCase):
    def accepts(self, path, text):
        code, output = check({path: text})
        self.assertEqual(code, 0, output)

    def refuses(self, path, text, line=1):
        code, output = check({path: text})
        self.assertEqual(code, 1, output)
        self.assertIn(f"{path}:{line}: ", output)

    def test_an_include_may_point_down(self):
        self.accepts("memory/policy.h", '#pragma once\n#include "offload/tier.h"\n#include "base/error.h"\n')
        self.accepts("base/log.cpp", "#include <memory>\n")
        self.accepts("optimizer/update.cpp", '#include "optimizer/update.h"\n#include "memory/access_stream.h"\n')
        self.accepts("tools/main.cpp", '#include <terrace/terrace.h>\n#include "integration/session.h"\n')

    def test_an_include_may_not_point_up(self):
        self.refuses("base/error.h", '#pragma once\n\n#include "offload/tier.h"\n', line=3)
        self.refuses("memory/policy.cpp", '#include "optimizer/update.h"\n')
        self.refuses("memory/policy.cpp", "#  include <terrace/terrace.h>\n")
        self.refuses("integration/session.cpp", '#include "tools/train.h"\n')
        self.refuses("optimizer/update.cpp", '#include "zero/shard.h"\n')

    def test_libtorch_stays_above_the_torch_free_floors(self):
        for header in ("torch/torch.h", "ATen/ATen.h", "c10/core/Allocator.h"):
            for floor in ("base", "offload", "memory", "optimizer"):
                self.refuses(f"{floor}/thing.cpp", f"#include <{header}>\n")
            self.accepts("integration/thing.cpp", f"#include <{header}>\n")
            self.accepts("tools/thing.h", f"#include <{header}>\n")
        self.accepts("zero/collectives_c10d.cpp", "#include <torch/csrc/distributed/c10d/Store.hpp>\n")
        self.refuses("zero/shard.cpp", "#include <ATen/ATen.h>\n")

    def test_the_logger_is_hidden_from_headers(self):
        self.refuses("base/log.h", "#include <spdlog/spdlog.h>\n")
        self.refuses("integration/session.h", "#include <fmt/format.h>\n")
        self.accepts("base/log.cpp", "#include <spdlog/spdlog.h>\n#include <fmt/format.h>\n")

    def test_a_test_follows_the_rules_of_its_floor(self):
        self.refuses("tests/base/error_test.cpp", '#include "memory/policy.h"\n')
        self.refuses("tests/memory/policy_test.cpp", "#include <torch/torch.h>\n")
        self.refuses("tests/memory/policy_test.cpp", "#include <terrace/terrace.h>\n")
        self.accepts("tests/integration/session_test.cpp", "#include <terrace/terrace.h>\n")
        self.refuses("memory/policy.cpp", '#include "tests/memory/reference.h"\n')
        self.accepts("tests/memory/policy_test.cpp", '#include "tests/memory/reference.h"\n#include "offload/tier.h"\n')

    def test_every_offence_is_counted(self):
        code, output = check({"base/a.h": '#include "offload/b.h"\n#include <fmt/core.h>\n', "offload/b.h": ""})
        self.assertEqual(code, 1)
        self.assertIn("2 files, 2 offences", output)

    def test_this_repository_passes(self):
        run = subprocess.run([sys.executable, "-B", CHECK], stdout=subprocess.PIPE, text=True, check=False)
        self.assertEqual(run.returncode, 0, run.stdout)


if __name__ == "__main__":
    unittest.main()
