import subprocess
import unittest


def git(*arguments):
    command = ["git", "-C", "/app/shop", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


class TestRepository(unittest.TestCase):
    def test_main_has_the_fix_and_nothing_else(self):
        subjects = git("log", "--format=%s", "main").splitlines()
        self.assertEqual(subjects, ["Fix the tax rate", "Add the tax to prices", "Start the shop"])
        self.assertEqual(git("ls-tree", "--name-only", "main").splitlines(), ["price.py", "tax.py"])
        self.assertEqual(git("show", "main:tax.py"), "TAX_PERCENT = 19")

    def test_the_experiment_is_unchanged(self):
        subjects = git("log", "--format=%s", "experiment").splitlines()
        self.assertEqual(subjects[:3], ["Try another colour", "Fix the tax rate", "Print while debugging"])
        self.assertEqual(len(subjects), 5)

    def test_main_is_checked_out_and_clean(self):
        self.assertEqual(git("branch", "--show-current"), "main")
        self.assertEqual(git("status", "--porcelain"), "")


if __name__ == "__main__":
    unittest.main()
