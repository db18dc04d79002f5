/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Traces every switch: captures a thread's stacks at its switch-out, and counts the wait at its switch-in. Walks and
 * task_newtask create the records, as nothing may be allocated with a run queue locked.
 */
#pragma once

/* Bit of task_struct.__state of a thread that has exited. */
enum {
	TASK_DEAD = 0x80,
};

/* Number of frames that belong to capturing the stack. Global, so that it is verified by itself, once. */
__noinline int own_frames(const struct stack_value *stack)
{
	int own = 0;

	if (!stack)
		return 0;
	for (u32 i = 0; i < OWN_FRAMES; i++) {
		for (u32 range = 0; range < OWN_CODE; range++) {
			if (stack->frames[i] >= own_code_begin[range] && stack->frames[i] < own_code_end[range])
				own = i + 1;
		}
	}
	return own;
}

/* ID of the kernel stack of the current thread, 0 for none; false if there is no room. */
static __always_inline bool take_kernel_stack(struct task_struct *task, struct scratch *scratch, struct stack_copy *copy, const void *arguments,
					      enum taken_at at, u32 *id)
{
	const struct pt_regs *regs = (const struct pt_regs *)bpf_task_pt_regs(task);
	struct seen_kernel_stack *seen = NULL;
	struct stack_value *kernel;
	u32 copied = 0, length, own;
	long bytes;

	if (bpf_core_field_exists(regs->ip)) {
		copied = copy_kernel_stack(regs, arguments, copy);
		if (copied) {
			/* Kernel threads have no user address; their stacks have no random gap, so the depth is stable. */
			u32 slot = seen_slot(regs->ip ? regs->ip : copied, copy->words[caller_at[at] & (KERNEL_WORDS - 1)]) & (SEEN_KERNEL_STACKS - 1);

			seen = bpf_map_lookup_elem(&kernel_stack_by_seen, &slot);
		}
	}
	if (seen && seen->generation == generation + 1 && (seen->bytes == copied || (seen->moves && seen->bytes <= copied)) && is_same_kernel_stack(seen, copy)) {
		*id = seen->id;
		return true;
	}
	bytes = bpf_get_task_stack(task, scratch->kernel.frames, sizeof(scratch->kernel.frames), 0);
	if (bytes <= 0)
		return true;
	length = (u64)bytes / 8;
	own = own_frames(&scratch->kernel);
		/* A stack_value starts with its ID and length, which overwrite the last own frame. */
	own &= OWN_FRAMES;
	kernel = (void *)&scratch->kernel + own * 8;
	length = length > own ? length - own : 0;
	if (!length)
		return true;
	kernel->length = length < max_depth ? length : max_depth;
	*id = number_of_stack(kernel, 0);
	if (!*id)
		return false;
	if (seen) {
		kernel->id = *id;
		keep_kernel_stack(seen, copy, kernel, copied, at);
	}
	return true;
}

/* Fills in the user stack of the current thread; false if there is no room. */
static __always_inline bool take_user_stack(struct task_struct *task, struct scratch *scratch, struct stack_copy *copy, struct place_key *key)
{
	const struct pt_regs *regs = (const struct pt_regs *)bpf_task_pt_regs(task);
	struct seen_user_stack *seen;
	enum user_end end;
	u32 slot = 0;

	if (!bpf_core_field_exists(regs->ip)) {
		key->user_end = USER_UNREADABLE;
		return true;
	}
	slot = slot_of_user_stack(regs, key->process);
	seen = bpf_map_lookup_elem(&user_stack_by_seen, &slot);
	if (!seen)
		return false;
	/* In 32-bit code the same addresses mean something else. */
	if ((u16)regs->cs == X86_USER_CS && has_same_registers(seen, key->process, regs->ip, regs->sp, regs->bp) &&
	    has_same_user_words(seen, copy, regs->sp)) {
		key->user_stack = seen->id;
		return true;
	}
	end = unwind_user(task, scratch, key->process, &seen, true);
	/* User space finds the rule for the next time. */
	key->user_end = end == USER_UNKNOWN ? USER_PARTLY : end;
	if (!scratch->user.length)
		return true;
	key->user_stack = number_of_stack(&scratch->user, key->process);
	end_keeping(seen, key->user_stack, end == USER_COMPLETE);
	return key->user_stack != 0;
}

/* Fills in the stacks of the current thread; false if there is no room. */
static __always_inline bool take_stacks(struct task_struct *task, const void *arguments, enum taken_at at, struct place_key *key)
{
	struct scratch *scratch;
	struct stack_copy *copy;
	u32 zero = 0;

	scratch = bpf_map_lookup_elem(&scratch_of_cpu, &zero);
	copy = bpf_map_lookup_elem(&stack_copy_of_cpu, &zero);
	if (!scratch || !copy || !take_kernel_stack(task, scratch, copy, arguments, at, &key->kernel_stack))
		return false;
	return !has_user_frames(task) || take_user_stack(task, scratch, copy, key);
}

static __always_inline void make_on_cpu_place(struct thread_record *record, const struct place_key *key)
{
	struct place_key on_cpu = *key;
	u32 place;

	on_cpu.state = STATE_ON_CPU;
	on_cpu.kernel_stack = 0;
	on_cpu.user_stack = 0;
	on_cpu.syscall = -1;
	on_cpu.in_iowait = 0;
	on_cpu.user_end = USER_COMPLETE;
	place = number_of_place(&on_cpu);
	record->on_cpu_place = place == PLACES ? 0 : place + 1;
	record->on_cpu_generation = generation + 1;
	if (place == PLACES)
		lose(LOST_PLACES);
}

/* Leaves the thread without a place until its next switch-out. */
static __always_inline void drop_place(struct thread_record *record, enum lost_reason reason, u64 now_ns)
{
	lose(reason);
	record->is_lost = true;
	record->generation = 0;
	take_time(record, now_ns);
}

static __always_inline void count_run(struct task_struct *task, struct thread_record *record, u64 now_ns)
{
	if (record->is_known && record->generation == generation + 1 && record->state != STATE_ON_CPU)
		count_unseen_run(task, record, now_ns);
	else
		count_on_cpu(record, now_ns);
}

static __always_inline void on_switch_out(struct task_struct *task, const void *arguments, enum thread_state state, bool has_ended,
					u64 now_ns)
{
	struct thread_record *record = bpf_task_storage_get(&record_by_thread, task, 0, 0);
	struct place_key key = {};
	u32 place;

	if (!record) {
		lose(LOST_THREADS);
		return;
	}
	record->is_skipped = !is_wanted(task, task->flags & PF_KTHREAD);
	if (record->is_skipped) {
		record->generation = 0;
		record->switches = switches_of(task);
		take_time(record, now_ns);
		return;
	}
	if (has_ended) {
		count_run(task, record, now_ns);
		return;
	}
	if (!fill_key(task, record, &key)) {
		drop_place(record, LOST_PROCESSES, now_ns);
		return;
	}
	key.state = state;
	key.in_iowait = BPF_CORE_READ_BITFIELD(task, in_iowait);
	if (!key.is_kernel)
		key.syscall = syscall_of(task);
	if (!take_stacks(task, arguments, AT_SWITCH, &key)) {
		drop_place(record, LOST_STACKS, now_ns);
		return;
	}
	place = number_of_seen_place(&key);
	if (place == PLACES) {
		drop_place(record, LOST_PLACES, now_ns);
		return;
	}
	/* The place of its on-CPU time has no label that the place of its wait lacks. */
	if (place != record->place || record->generation != generation + 1 || record->on_cpu_generation != generation + 1) {
		remember_ready_place(place, &key);
		make_on_cpu_place(record, &key);
	}
	count_run(task, record, now_ns);
	record->place = place;
	record->state = state;
	record->since_ns = now_ns;
	record->switches = switches_of(task);
	record->generation = generation + 1;
	record->is_known = true;
	record->is_unresolved = false;
	record->is_lost = false;
}

/* A new thread waits for its first CPU without a switch-out: there is no stack yet. */
static __always_inline void count_new(struct task_struct *task, struct thread_record *record, u64 now_ns)
{
	u64 ns = take_time(record, now_ns);
	struct place_key key = {};
	u32 place;

	if (!(wanted_states & 1u << STATE_READY) || !is_wanted(task, task->flags & PF_KTHREAD))
		return;
	if (!fill_key(task, record, &key)) {
		lose(LOST_PROCESSES);
		return;
	}
	key.state = STATE_READY;
	place = number_of_place(&key);
	if (place == PLACES)
		lose(LOST_PLACES);
	else
		add(place, ns, 1, 1);
}

static __always_inline void on_switch_in(struct task_struct *task, u64 now_ns)
{
	struct thread_record *record = bpf_task_storage_get(&record_by_thread, task, 0, 0);

	/* A missing record is counted at the next switch-out. */
	if (!record || record->is_skipped)
		return;
	if (record->is_new)
		count_new(task, record, now_ns);
	else if (record->is_known && record->generation == generation + 1 && record->switches == switches_of(task))
		count_wait(task, record, now_ns, true);
	else if (!record->is_lost)
		lose(LOST_UNSEEN);
	record->is_new = false;
	record->waker = WAKER_UNSEEN;
	/* Time that was not seen is unattributed. */
	take_time(record, now_ns);
	record->state = STATE_ON_CPU;
	record->since_ns = now_ns;
}

static __always_inline bool is_traced(const struct task_struct *task)
{
	/* Walks visit no threads outside the PID namespace either. */
	return task->pid && task->tgid != own_tgid && (!wanted_tgid || task->tgid == wanted_tgid) && own_number(task);
}

/* Two stacks and three sums per switch: 1.5 us if both stacks are cached, 4 us if not. */
SEC("tp_btf/sched_switch")
int BPF_PROG(on_sched_switch, bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state)
{
	struct scratch *scratch;
	u32 zero = 0;
	u64 now_ns;

	scratch = is_tracing ? bpf_map_lookup_elem(&scratch_of_cpu, &zero) : NULL;
	if (!scratch)
		return 0;
	now_ns = bpf_ktime_get_ns();
	if (is_traced(prev)) {
		/* A preempted thread may have been about to block; it is runnable. */
		scratch->state = state_of_bits(prev, preempt ? 0 : prev_state);
		on_switch_out(prev, ctx, scratch->state, prev_state & TASK_DEAD, now_ns);
	}
	if (is_traced(next))
		on_switch_in(next, now_ns);
	return 0;
}

SEC("tp_btf/task_newtask")
int BPF_PROG(on_task_newtask, struct task_struct *task)
{
	struct thread_record *record;

	if (!is_tracing || !is_traced(task))
		return 0;
	record = bpf_task_storage_get(&record_by_thread, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!record) {
		lose(LOST_THREADS);
		return 0;
	}
	record->counted_ns = bpf_ktime_get_ns();
	record->is_new = true;
	return 0;
}
