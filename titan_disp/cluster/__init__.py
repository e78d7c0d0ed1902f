"""The operations around a long run: plan, preflight, preemption."""
