"""`whet prove`: kill a training at random times and at disk calls, resume it and compare every bit."""
