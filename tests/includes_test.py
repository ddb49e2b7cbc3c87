#!/usr/bin/env python3
"""The ladder of includes: that the check finds what it should, and that the project has none of it."""
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
sys.dont_write_bytecode = True

from check_includes import faults_in, faults_under  # noqa: E402  (after the path is set)


def messages(path, source):
    return [message for _, message in faults_in(path, source)]


class Ladder(unittest.TestCase):
    def test_a_room_may_include_itself_and_those_above(self):
        source = '#include "tessera/comm/segment.h"\n#include "tessera/base/error.h"\n#include <ATen/core/Tensor.h>\n'
        self.assertEqual(messages("tessera/comm/window.cpp", source), [])

    def test_a_room_may_not_include_one_below(self):
        self.assertIn("tessera/comm must not include tessera/engine",
                      messages("tessera/comm/window.cpp", '#include "tessera/engine/unit.h"')[0])

    def test_models_do_not_know_the_engine(self):
        self.assertEqual(len(messages("models/llama.cpp", '#include "tessera/engine/observer.h"')), 1)
        self.assertEqual(len(messages("models/llama.cpp", '#include "tessera/tessera.h"')), 1)

    def test_the_library_does_not_know_models_or_the_program(self):
        self.assertEqual(len(messages("tessera/debug/compare.cpp", '#include "models/llama.h"\n#include "cli/train.h"')), 2)

    def test_pure_rooms_have_no_libtorch(self):
        for header in ("torch/torch.h", "ATen/core/Tensor.h", "c10/util/Exception.h"):
            self.assertEqual(len(messages("tessera/layout/layout.h", f"#pragma once\n#include <{header}>")), 1)

    def test_a_room_without_a_place_is_a_fault(self):
        self.assertEqual(len(messages("tessera/utils/strings.cpp", "")), 1)

    def test_headers(self):
        self.assertEqual(messages("cli/train.h", "#pragma once\nusing namespace tessera;\n"),
                         ["`using namespace` in a header reaches every file that includes it"])
        self.assertEqual(messages("cli/train.h", "int f();\n"), ["a header starts with #pragma once"])

    def test_includes_are_paths_from_the_root(self):
        self.assertEqual(len(messages("cli/train.cpp", '#include "train.h"\n#include "../models/llama.h"')), 2)

    def test_tests_may_include_anything(self):
        self.assertEqual(messages("tests/cli_test.cpp", '#include "cli/train.h"\n#include "tessera/engine/engine.h"'), [])


class Project(unittest.TestCase):
    def test_has_no_faults(self):
        self.assertEqual([f"{path}:{number}: {message}" for path, number, message in faults_under(ROOT)], [])


if __name__ == "__main__":
    unittest.main()
