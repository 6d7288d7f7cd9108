"""Settings of the tests that hypothesis makes models and configurations for."""

from hypothesis import HealthCheck, Phase, settings

SETTINGS = settings(
    deadline=None,
    database=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)
