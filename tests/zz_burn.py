import time


def burn():
    while time.process_time() < 5:
        pass
