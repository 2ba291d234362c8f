"""What happens when: stages, schedules, the critical path."""
