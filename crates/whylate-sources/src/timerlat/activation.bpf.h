/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The activation of each CPU's measured thread, which the programs and the thread tell each other about. */
#pragma once

/* One activation of the measured thread of a CPU. */
struct activation {
	/* Written by the thread before it sleeps; the kernel's timer has the same time. */
	u64 due_ns;
	/* When the timer's function was called; 0: it was not yet. */
	u64 irq_ns;
	/* When the thread ran, or had the CPU where nobody can tell that; 0: it has not yet. */
	u64 thread_ns;
	/* When the thread got the CPU the last time before its timer came in. */
	u64 back_ns;
	/*
	 * The thread whose timer it is, which the programs find out: user space may be in another PID namespace. By its
	 * struct task_struct, because looking into that takes another cache line.
	 */
	u64 task;
	/* As it is shown. */
	u32 tid;
	/* Whether a thread is measured on this CPU. */
	u32 is_measured;
	/* Latencies from which on a late event is sent, of the thread and of the interrupt; user space changes them. */
	u64 explain_over_ns;
	u64 explain_irq_over_ns;
	/* What is above is used at each activation, when no cache has it; the rest only where causes are asked for. */
	/* The longest latency of the interrupt that found the CPU idle. */
	u64 max_from_idle_ns;
	u64 _unused[7];
};
_Static_assert(__builtin_offsetof(struct activation, max_from_idle_ns) == 64, "an activation takes more than one cache line");
_Static_assert(sizeof(struct activation) % 64 == 0, "activations of two CPUs share a cache line");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space makes it as long as there are CPUs. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct activation);
} activation_by_cpu SEC(".maps");

static __always_inline struct activation *activation_here(void)
{
	u32 cpu = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&activation_by_cpu, &cpu);
}
