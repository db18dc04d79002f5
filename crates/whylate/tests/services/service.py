# SPDX-License-Identifier: MIT OR Apache-2.0
"""A slow service: usage: service.py FOLDER KIND...

Of each kind a client asks a service again and again, and the service is slow for the reason that its kind names. What each
process is called begins with its kind, for those of several to be told apart. `idle` starts what has nothing to do. It ends
with its standard input; an answer on standard output says that all of it is there.
"""

import fcntl, mmap, os, select, signal, socket, sys, threading, time

CPU = max(os.sched_getaffinity(0))
folder, kinds = sys.argv[1], sys.argv[2:]

cgroups = []


def compute(ms):
    until = time.thread_time() + ms / 1000
    while time.thread_time() < until:
        pass


def process(name, work):
    """Names have room for 15 bytes."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with open("/proc/self/comm", "w") as comm:
            comm.write(name)
        try:
            work()
        finally:
            os._exit(1)
    return child


def forever(step):
    def work():
        while True:
            step()

    return work


def pipes():
    return os.pipe(), os.pipe()


def helper(name, answer):
    """A request to it: it answers after it has done that."""
    asked, answered = pipes()

    def step():
        if not os.read(asked[0], 1):
            os._exit(0)
        answer()
        os.write(answered[1], b"x")

    process(name, forever(step))

    def request():
        os.write(asked[1], b"x")
        os.read(answered[0], 1)

    return request


def pinned(work):
    def on_cpu():
        os.sched_setaffinity(0, {CPU})
        work()

    return on_cpu


# Each makes what its service is slow for, within the service, and returns what a request is.


def fifo(kind):
    def hog():
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
        while True:
            compute(40)
            time.sleep(0.008)

    process(f"{kind}-hog", pinned(hog))
    os.sched_setaffinity(0, {CPU})
    return lambda: compute(30)


def flock(kind):
    path = f"{folder}/{kind}.lock"

    def hold():
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.2)
        time.sleep(0.02)

    process(f"{kind}-holder", forever(hold))

    def request():
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)

    return request


def disk(kind):
    def write(number):
        block = mmap.mmap(-1, 4 << 20)
        file = os.open(f"{folder}/{kind}-{number}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        while True:
            for at in range(2):
                os.pwrite(file, block, at * len(block))

    # Some 200 MB are always in front of it.
    for number in range(48):
        process(f"{kind}-writer", lambda: write(number))
    log = os.open(f"{folder}/{kind}.log", os.O_WRONLY | os.O_CREAT)

    def request():
        for _ in range(60):
            os.write(log, b"x" * 4096)
            os.fdatasync(log)

    return request


def peer(kind):
    return helper(f"{kind}-peer", lambda: time.sleep(0.15))


def niced(kind):
    def encode():
        # The first time.
        os.nice(19 - os.nice(0))
        os.sched_setaffinity(0, {CPU})
        compute(4)

    process(f"{kind}-spinner", pinned(forever(lambda: compute(1000))))
    return helper(f"{kind}-encoder", encode)


def quota(kind):
    os.sched_setaffinity(0, {CPU})
    with open(f"{cgroups[0]}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    return lambda: compute(40)


# Somebody else keeps interrupts off on its CPU.
def irqsoff(kind):
    os.sched_setaffinity(0, {CPU})
    return lambda: compute(100)


def interpreter(kind):
    for _ in range(3):
        threading.Thread(target=forever(lambda: compute(1000)), daemon=True).start()
    return lambda: compute(30)


def own(kind):
    return lambda: compute(150)


def worker(kind):
    return helper(f"{kind}-worker", lambda: compute(150))


def record(kind):
    path = f"{folder}/{kind}.lock"

    def hold():
        with open(path, "w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            compute(150)
        time.sleep(0.02)

    process(f"{kind}-holder", forever(hold))

    def request():
        with open(path, "w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)

    return request


def child(kind):
    return lambda: os.waitpid(process(f"{kind}-child", lambda: compute(150) or os._exit(0)), 0)


# Each of these waits is short: only their sum is long.


def indexer(kind):
    path = f"{folder}/{kind}.lock"

    def hold():
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.049)
        time.sleep(0.002)

    process(f"{kind}-holder", forever(hold))

    def request():
        for _ in range(4):
            with open(path, "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)

    return request


def journal(kind):
    path = f"{folder}/{kind}.lock"

    def hold():
        with open(path, "w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            compute(20)
        time.sleep(0.002)

    process(f"{kind}-holder", forever(hold))

    def request():
        for _ in range(8):
            with open(path, "w") as file:
                fcntl.lockf(file, fcntl.LOCK_EX)

    return request


def chatty(kind):
    ask = helper(f"{kind}-worker", lambda: compute(2))

    def request():
        for _ in range(50):
            ask()

    return request


def chained(kind):
    back = helper(f"{kind}-back", lambda: compute(15))

    def front():
        back()
        back()

    ask = helper(f"{kind}-front", front)

    def request():
        for _ in range(5):
            ask()

    return request


def socket_peer(kind):
    here, there = socket.socketpair()

    def serve():
        there.recv(100)
        compute(25)
        there.send(b"x")

    process("socket-peer", forever(serve))

    def request():
        for _ in range(6):
            here.send(b"x")
            here.recv(100)

    return request


def logger(kind):
    read, write = os.pipe()

    def log():
        os.read(read, 4096)
        compute(3)

    process(f"{kind}-reader", forever(log))

    def request():
        for _ in range(60):
            os.write(write, b"x" * 4096)

    return request


def period(kind):
    """As `quota`, with periods that are shorter than what is late."""
    return quota(kind)


KINDS = {
    made.__name__: made
    for made in [
        *[fifo, flock, disk, peer, niced, quota, irqsoff, interpreter, own, worker, record, child],
        *[indexer, journal, chatty, chained, socket_peer, logger, period],
    ]
}


def service(kind):
    ours, theirs = socket.socketpair()

    def serve():
        request = KINDS[kind](kind)
        ours.send(b"x")
        while ours.recv(1):
            request()
            ours.send(b"x")

    def ask():
        theirs.recv(1)
        while True:
            theirs.send(b"x")
            theirs.recv(1)
            time.sleep(0.03)

    # The only one of its kind is called as people would.
    process("service" if len(kinds) == 1 else f"{kind}-service", serve)
    process(f"{kind}-client", ask)


def idle():
    """Nothing of this is late, though each of it waits for longer than what is."""

    def sleeper():
        time.sleep(0.15)

    def event_loop():
        select.select([], [], [], 0.15)

    beat = os.pipe()

    def heart():
        time.sleep(0.15)
        os.write(beat[1], b"x")

    # A shell in a loop: it waits for a child that sleeps.
    def shell():
        os.waitpid(process("idle-child", lambda: time.sleep(0.15) or os._exit(0)), 0)

    def pool():
        there = threading.Condition()

        def work():
            while True:
                with there:
                    there.wait()

        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        while True:
            time.sleep(0.15)
            with there:
                there.notify_all()

    # A client that thinks, and a server with a thread for it.
    here, there = socket.socketpair()

    def think():
        time.sleep(0.15)
        here.send(b"x")
        here.recv(1)

    process("idle-sleeper", forever(sleeper))
    process("idle-loop", forever(event_loop))
    process("idle-heart", forever(heart))
    process("idle-listener", forever(lambda: os.read(beat[0], 1)))
    process("idle-shell", forever(shell))
    process("idle-pool", pool)
    process("idle-thinker", forever(think))
    process("idle-server", forever(lambda: there.send(there.recv(1))))


def make_cgroup(quota_us, period_us):
    name = f"whylate-trial-{os.getpid()}"
    for parent, file, text in [
        ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", quota_us),
        ("/sys/fs/cgroup/cpu,cpuacct", "cpu.cfs_quota_us", quota_us),
        ("/sys/fs/cgroup", "cpu.max", f"{quota_us} {period_us}"),
    ]:
        if not os.path.exists(f"{parent}/cgroup.procs"):
            continue
        os.mkdir(f"{parent}/{name}")
        cgroups.append(f"{parent}/{name}")
        if file == "cpu.cfs_quota_us":
            with open(f"{parent}/{name}/cpu.cfs_period_us", "w") as limit:
                limit.write(str(period_us))
        with open(f"{parent}/{name}/{file}", "w") as limit:
            limit.write(str(text))
        return


def main():
    os.setpgid(0, 0)
    # All of them end by it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        if "quota" in kinds:
            make_cgroup(20000, 100000)
        if "period" in kinds:
            make_cgroup(4000, 16000)
        for kind in kinds:
            if kind == "idle":
                idle()
            else:
                service(kind)
        time.sleep(0.2)
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        os.killpg(0, signal.SIGTERM)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            pass
        for cgroup in cgroups:
            for _ in range(100):
                try:
                    os.rmdir(cgroup)
                    break
                except OSError:
                    time.sleep(0.01)


main()
