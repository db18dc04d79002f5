# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Measures $1 rounds of $2 s. Each run is preceded by a line with its name, and with the CPU times before and after it.
cd /tmp
measure() {
    name=$1
    shift
    # In a pipe, `times` would be of another shell.
    times >before
    "$@" >out 2>/dev/null || true
    times >after
    echo "@ $name $(sed -n 2p before) $(sed -n 2p after)"
    cat out
}
rtla() { measure rtla$1 /usr/bin/rtla timerlat hist -p $2 -d ${3}s -b 1 -E 8192; }
tracer() { measure tracer$1 whylate timerlat hist -k -p $2 --json -d ${3}s; }
bpf() { measure bpf$1 whylate timerlat hist --backend bpf -p $2 --json -d ${3}s; }
# So that no program always follows the same one.
for round in $(seq $1); do
    rtla "" 1000 $2; tracer "" 1000 $2; bpf "" 1000 $2
    tracer "" 1000 $2; rtla "" 1000 $2; bpf "" 1000 $2
done
for round in $(seq $(($1 / 2 + 1))); do
    rtla -10kHz 100 $2; tracer -10kHz 100 $2
done
echo "@ end 0m0s 0m0s 0m0s 0m0s"
