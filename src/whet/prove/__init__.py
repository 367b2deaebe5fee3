"""`whet prove`: kill a training run at random times and at disk calls, resume it, and compare every bit."""
