"""For all tests: how long an example takes says nothing on a shared machine; speed belongs in tests/bench."""

try:
    from hypothesis import settings
except ImportError:  # tests of roles and Terraform run without it
    pass
else:
    settings.register_profile("shared", deadline=None)
    settings.load_profile("shared")
