"""The tests that every algorithm must pass: the test-suite and `ai3_ops.check` both run them."""
