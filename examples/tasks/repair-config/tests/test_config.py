import hashlib
import json
import subprocess
import unittest

SERVICE = "0fce86353102cfed2b705283837324dfadbcc6da4d06f62f07f6289dea0af004"
"""SHA-256 of the service that the task came with."""


class TestConfig(unittest.TestCase):
    def test_the_service_was_not_changed(self):
        with open("/app/service.py", "rb") as file:
            self.assertEqual(hashlib.sha256(file.read()).hexdigest(), SERVICE)

    def test_the_service_accepts_its_configuration(self):
        done = subprocess.run(
            ["python3", "/app/service.py", "--check"], capture_output=True, text=True, timeout=10
        )
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "ok"))

    def test_values_that_were_right_are_kept(self):
        with open("/app/service.json") as file:
            config = json.load(file)
        expected = {
            "name": "orders",
            "port": 8080,
            "workers": 4,
            "timeouts": {"connect_s": 2.5, "read_s": 30},
            "log_level": "warning",
            "allowed_hosts": ["orders.internal", "localhost"],
        }
        self.assertEqual(config, expected)


if __name__ == "__main__":
    unittest.main()
