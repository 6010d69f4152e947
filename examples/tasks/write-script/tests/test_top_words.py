import subprocess
import tempfile
import unittest

PROGRAM = "/app/top_words"


def top_words(text, count):
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        done = subprocess.run(
            [PROGRAM, file.name, str(count)], capture_output=True, text=True, timeout=10, check=True
        )
    return done.stdout.splitlines()


class TestTopWords(unittest.TestCase):
    def test_counts_words_of_any_case(self):
        self.assertEqual(top_words("The the THE cat", 5), ["3 the", "1 cat"])

    def test_sorts_by_count_and_then_by_word(self):
        self.assertEqual(top_words("pear fig fig plum apple pear", 3), ["2 fig", "2 pear", "1 apple"])

    def test_splits_at_everything_that_is_no_letter(self):
        self.assertEqual(top_words("a1b--c_d\nb", 9), ["2 b", "1 a", "1 c", "1 d"])

    def test_prints_nothing_for_a_file_without_words(self):
        self.assertEqual(top_words("12 34\n", 3), [])

    def test_prints_at_most_n_lines(self):
        self.assertEqual(top_words("a b c d", 2), ["1 a", "1 b"])


if __name__ == "__main__":
    unittest.main()
