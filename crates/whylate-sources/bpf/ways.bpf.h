/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Set-associative tables in plain BPF arrays: the keys of one set fill a cache line, a free way holds key 0, and a
 * way is claimed by compare-and-exchange. One key is never inserted by two CPUs at once; the callers say why.
 */
#pragma once

enum {
	/* Seven keys and a counter fill a cache line. */
	WAYS = 7,
};

/*
 * The low half of a key as a plain number. The verifier forbids arithmetic on a kernel pointer, but lets a privileged
 * program copy half of it; kernel objects differ in that half.
 */
static __always_inline u32 low_half(u64 key)
{
	u64 low = (u32)key;

#ifdef __bpf__
	/* In C the compiler may compute with the whole key and truncate the result. */
	asm volatile("r0 = %1; w0 = w0; %0 = r0" : "=r"(low) : "r"(key) : "r0");
#endif
	return low;
}

/* Fibonacci hashing: the top `bits` bits depend on every bit below. */
static __always_inline u32 hash_of(u32 low, u32 bits)
{
	return (low * 0x9E3779B1U) >> (32 - bits);
}

/* A second hash: keys that collide in one table do not in the other. */
static __always_inline u32 other_hash_of(u32 low, u32 bits)
{
	return (low * 0x85EBCA6BU) >> (32 - bits);
}

/* The way that holds the key, or WAYS. */
static __always_inline u32 way_of(const u64 *keys, u64 key)
{
#pragma unroll
	for (u32 way = 0; way < WAYS; way++) {
		if (keys[way] == key)
			return way;
	}
	return WAYS;
}

/* Claims a free way for the key; WAYS if all are in use. */
static __always_inline u32 claim_way(u64 *keys, u64 key)
{
#pragma unroll
	for (u32 way = 0; way < WAYS; way++) {
		if (!keys[way] && !__sync_val_compare_and_swap(&keys[way], 0, key))
			return way;
	}
	return WAYS;
}

/* Difference of clocks read on different CPUs, which may step back slightly. */
static __always_inline u64 since(u64 now_ns, u64 then_ns)
{
	return now_ns > then_ns ? now_ns - then_ns : 0;
}
