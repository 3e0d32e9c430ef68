"""The owner's courtesy: when a volunteer's machine is left alone, and why. Policy is pure, sensors are thin."""
