/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Whether an interrupted submission thread is working, by its stack. */
#pragma once

enum sample_limits {
	/* io_submit_sqes(), io_do_iopoll(), and the function that runs completions. */
	WORK_FUNCTIONS = 3,
	/* The kernel's maximum. */
	SAMPLED_FRAMES = 127,
};

/* Whether work is detected by samples. */
const volatile bool by_samples = false;
/* Address range of each function's code; 0 to 0 if the kernel lacks it. */
const volatile u64 work_begins_at[WORK_FUNCTIONS] = {};
const volatile u64 work_ends_at[WORK_FUNCTIONS] = {};

struct sampled_stack {
	u64 frames[SAMPLED_FRAMES];
};

/* Too large for the stack of a program. A timer's interrupt is not interrupted by another one. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct sampled_stack);
} sampled_stack_by_cpu SEC(".maps");

static __always_inline bool is_work(u64 address)
{
#pragma unroll
	for (u32 i = 0; i < WORK_FUNCTIONS; i++) {
		if (address >= work_begins_at[i] && address < work_ends_at[i])
			return true;
	}
	return false;
}

/* Returns false, and counts a lost sample, if the kernel cannot walk the stack. */
static __always_inline bool read_stack(void *ctx, bool *has_work)
{
	struct sampled_stack *stack;
	u32 zero = 0;
	long size;

	stack = bpf_map_lookup_elem(&sampled_stack_by_cpu, &zero);
	if (!stack)
		return false;
	size = bpf_get_stack(ctx, stack->frames, sizeof(stack->frames), 0);
	if (size <= 0) {
		lose(SQ_LOST_SAMPLES);
		return false;
	}
	*has_work = false;
	for (u32 i = 0; i < SAMPLED_FRAMES && i * sizeof(u64) < (u64)size; i++) {
		if (is_work(stack->frames[i])) {
			*has_work = true;
			break;
		}
	}
	return true;
}

/* Counts a request in one instruction: a sample may interrupt it, and readers do not wait for it. */
static __always_inline int count_request(const struct task_struct *task)
{
	struct sq_thread *thread;

	if (!(task->flags & PF_IO_WORKER))
		return 0;
	thread = known_thread(task);
	if (thread)
		__sync_fetch_and_add(&thread->submitted, 1);
	return 0;
}
