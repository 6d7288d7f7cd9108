import sys
sys.path[:0] = ["tests","tests/guards"]
import jobs
from launch import launch
from parallel3d.testing import GlooPool
if __name__ == "__main__":
    pool = None
    for name in sys.argv[1:]:
        kind, _, name = name.rpartition(":")
        args = ("/tmp/w/7Ax/journals",) if name == "killed_in_debug" else ()
        if kind == "l":
            dying = {"one_is_killed": [2], "host_is_killed": [0], "killed_in_debug": [2]}.get(name, [])
            found = [r for r, _ in launch(jobs.ending, getattr(jobs, name), *args, ranks=4, dying=dying)]
        else:
            pool = pool or GlooPool(4)
            found = pool.run(jobs.ending, getattr(jobs, name), *args, world_size=4, timeout=60)
        print("=====", name)
        for r, e in enumerate(found):
            print(r, e and (e.error, round(e.seconds, 1)), e and e.message)
