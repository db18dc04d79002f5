/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Unwinds user stacks. User space translates unwind information (.eh_frame) into a rule for each address in a stack: few,
 * as threads block in few places. A frame without a rule ends the unwinding, and is requested from user space.
 */
#pragma once

struct walk {
	struct task_struct *task;
	struct scratch *scratch;
	u64 ip;
	u64 sp;
	u64 bp;
	/* Address and size of what is in the window. */
	u64 window_at;
	u32 window_bytes;
	u32 process;
	u32 length;
	u32 end;
	/* Where the frame pointer was read; 0: it is still the register. */
	u64 bp_at;
	/* Cache entry that collects the words used, and the initial stack pointer. */
	struct seen_user_stack *seen;
	u64 began_at;
};

/* Rust counterpart: Rules::slot(). */
static __always_inline u32 rule_slot(u32 process, u64 ip)
{
	return ((ip ^ (u64)process << 40) * 0x9e3779b97f4a7c15ull) >> 40;
}

/*
 * Where to start copying for the word at `at`: in its page, and below it, since the registers saved below the return
 * address are read next. Global, so that it is verified by itself.
 */
__noinline u64 window_begin(u64 sp, u64 at)
{
	u64 page = at & ~(PAGE_BYTES - 1ull);
	u64 from = sp & ~7ull;

	if (from > at || at - from > WINDOW_BYTES / 2)
		from = at;
	return from < page ? page : from;
}

enum {
	/* File systems in memory (include/uapi/linux/magic.h), which never block. */
	TMPFS_MAGIC = 0x01021994,
	RAMFS_MAGIC = 0x858458f6,
	ENOENT = 2,
};

/* Sets `magic` to that of the file system of a mapping; 0: no file. */
static long read_fs_magic(struct task_struct *task, struct vm_area_struct *area, u64 *magic)
{
		/* Reading through a NULL vm_file yields 0. */
	*magic = BPF_CORE_READ(area, vm_file, f_inode, i_sb, s_magic);
	return 0;
}

/* Global, so that the verifier follows only one path at the call. */
__noinline int never_blocks(int error, u64 magic)
{
	/* Without a mapping, reading fails at once. */
	if (error)
		return error == -ENOENT;
	return !magic || magic == TMPFS_MAGIC || magic == RAMFS_MAGIC;
}

/*
 * Whether a sleeping thread's memory can be read without blocking: its mmap lock is free, and no page has to come from a
 * file system that may not answer. Both may change within the microsecond until it is read.
 */
static __always_inline bool is_responsive(struct task_struct *task, u64 at)
{
	u64 magic = 0;
	long error = bpf_find_vma(task, at, read_fs_magic, &magic, 0);

	return never_blocks(error, magic);
}

enum {
	/* Mappings are mostly changed within microseconds, as long as this many tries take. */
	RESPONSE_TRIES = 32,
};

struct answer {
	struct task_struct *task;
	u64 at;
};

static long try_again(u64 index, struct answer *answer)
{
	return is_responsive(answer->task, answer->at);
}

/* Spins until the memory is responsive, unless another thread of the process was tried in vain in this round. */
static __always_inline void wait_until_responsive(struct task_struct *task, u64 at)
{
	struct answer answer = { .task = task, .at = at };
	long tries;

	if (unresponsive_tgid == task->tgid && unresponsive_round == walk_round + 1)
		return;
	tries = bpf_loop(RESPONSE_TRIES, try_again, &answer, 0);
	if (tries < RESPONSE_TRIES)
		return;
	unresponsive_tgid = task->tgid;
	unresponsive_round = walk_round + 1;
}

/* Copies the chunk of the thread's stack that contains a word. */
static __always_inline int fill_window(struct walk *walk, u64 at, bool is_own)
{
	u64 from = window_begin(walk->sp, at);
	u32 bytes = PAGE_BYTES - (from & (PAGE_BYTES - 1));

	if (bytes > WINDOW_BYTES)
		bytes = WINDOW_BYTES;
	walk->window_bytes = 0;
	if (is_own) {
		if (bpf_probe_read_user(walk->scratch->window, bytes, (void *)from))
			return -1;
	} else if (!is_responsive(walk->task, from)) {
		walk->end = USER_UNREAD;
		return -1;
	} else if (bpf_copy_from_user_task(walk->scratch->window, bytes, (void *)from, walk->task, 0)) {
		return -1;
	}
	walk->window_at = from;
	walk->window_bytes = bytes;
	return 0;
}

/* Reads a word of the thread's stack through the window: the words that are read next lie above. */
static __always_inline int read_word(struct walk *walk, u64 at, u64 *word, bool is_own)
{
	u64 offset = at - walk->window_at;

	if (at & 7)
		return -1;
	if (at < walk->window_at || offset + 8 > walk->window_bytes) {
		if (fill_window(walk, at, is_own))
			return -1;
		offset = at - walk->window_at;
		/* Comparing the stack would need a second window: it is unwound each time. */
		if (!is_own && walk->window_at != (walk->began_at & ~7ull))
			keep_no_words(walk->seen);
	}
	*word = walk->scratch->window[(offset >> 3) & (WINDOW_BYTES / 8 - 1)];
	return 0;
}

static __always_inline void ask(struct walk *walk, bool innermost)
{
	u64 number = __sync_fetch_and_add(&questions, 1);
	u32 index = number;
	struct unknown_frame *unknown = bpf_map_lookup_elem(&unknown_frames, &index);

	if (!unknown)
		return;
	unknown->ip = walk->ip;
	unknown->sp = walk->sp;
	unknown->bp = walk->bp;
	unknown->process = walk->process;
	unknown->tgid = own_namespace ? walk->scratch->tgid : (u32)walk->task->tgid;
	unknown->innermost = innermost;
	unknown->tid = own_namespace ? walk->scratch->tid : (u32)walk->task->pid;
	/* Written last on every architecture; the round shows questions that are late. */
	__sync_lock_test_and_set(&unknown->asked_in, (u32)(number >> 32) + 1);
}

enum {
	/* User space has to be asked, or has been. */
	RULE_TO_ASK = -1,
	RULE_IS_ASKED = -2,
	RULE_NO_ROOM = -3,
};

/* Slot of the rule for an address, or one of the above. Global, so that it is verified by itself, once. */
__noinline int slot_of_rule(u32 process, u64 ip)
{
	u32 slot = rule_slot(process, ip);

	for (u32 probe = 0; probe < RULE_PROBES; probe++) {
		u32 index = (slot + probe) & (rule_slots - 1);
		struct unwind_rule *rule = bpf_map_lookup_elem(&rule_by_slot, &index);

		if (!rule)
			break;
		if (rule->base == RULE_NONE && __sync_val_compare_and_swap(&rule->base, RULE_NONE, RULE_CLAIMED) == RULE_NONE) {
			rule->ip = ip;
			rule->process = process;
			barrier();
			rule->base = RULE_ASKED;
			return RULE_TO_ASK;
		}
		if (rule->ip != ip || rule->process != process)
			continue;
		/* Here, as the verifier would follow the whole unwinding once more for another end of it. */
		if (rule->base == RULE_FAILED)
			unread_now = UNREAD_CODE;
		return rule->base == RULE_ASKED || rule->base == RULE_CLAIMED ? (int)RULE_IS_ASKED : (int)index;
	}
	return RULE_NO_ROOM;
}

/* Rule of the current frame; NULL if user space has to be asked first, or there is no room for one. */
static __always_inline struct unwind_rule *find_rule(struct walk *walk, bool innermost)
{
	/* User addresses do not have this bit. */
	int found = slot_of_rule(walk->process, walk->ip | (u64)innermost << 63);
	u32 index = found;

	if (found >= 0)
		return bpf_map_lookup_elem(&rule_by_slot, &index);
	if (found == RULE_NO_ROOM) {
		lose(LOST_RULES);
		return NULL;
	}
	if (found == RULE_TO_ASK)
		ask(walk, innermost);
	walk->end = USER_UNKNOWN;
	return NULL;
}

static __always_inline long step_with(u64 index, struct walk *walk, bool is_own)
{
	/* Not from `walk`, of which the verifier would track each possible value. */
	bool innermost = index == 0;
	struct unwind_rule *rule;
	u64 cfa, caller, bp_at;

	if (index >= MAX_FRAMES || index >= max_depth)
		return 1;
	walk->scratch->user.frames[index] = walk->ip;
	walk->length = index + 1;
	rule = find_rule(walk, innermost);
	if (!rule)
		return 1;
	switch (rule->base) {
	case RULE_ROOT:
		walk->end = USER_COMPLETE;
		return 1;
	case RULE_SP:
		cfa = walk->sp + rule->cfa_offset;
		break;
	case RULE_BP:
		keep_frame_pointer(walk->seen, walk->began_at, walk->bp_at, walk->bp);
		cfa = walk->bp + rule->cfa_offset;
		break;
	case RULE_AT_BP:
		keep_frame_pointer(walk->seen, walk->began_at, walk->bp_at, walk->bp);
		if (read_word(walk, walk->bp + rule->cfa_offset, &cfa, is_own))
			return 1;
		keep_frame_pointer(walk->seen, walk->began_at, walk->bp + rule->cfa_offset, cfa);
		break;
	case RULE_CHAIN:
		keep_frame_pointer(walk->seen, walk->began_at, walk->bp_at, walk->bp);
		if (!walk->bp) {
			/* Code without frame pointers may have left any value in the register. */
			walk->end = by_frame_pointers ? USER_PARTLY : USER_COMPLETE;
			return 1;
		}
		cfa = walk->bp + 16;
		break;
	default:
		return 1;
	}
	/* Callers lie above, which ensures that the loop ends. */
	if (cfa <= walk->sp || read_word(walk, cfa - 8, &caller, is_own))
		return 1;
	keep_user_word(walk->seen, cfa - 8 - walk->began_at, caller);
	if (rule->base == RULE_CHAIN || rule->base == RULE_AT_BP)
		bp_at = walk->bp;
	else
		bp_at = rule->bp_offset == BP_KEPT ? 0 : cfa + rule->bp_offset;
	if (bp_at) {
		if (read_word(walk, bp_at, &walk->bp, is_own))
			return 1;
		walk->bp_at = bp_at;
	}
	if (!caller) {
		walk->end = USER_COMPLETE;
		return 1;
	}
	walk->sp = cfa;
	walk->ip = caller;
	return 0;
}

static long step(u64 index, struct walk *walk)
{
	return step_with(index, walk, false);
}

/* Variant for contexts that may not sleep. */
static long step_of_own(u64 index, struct walk *walk)
{
	return step_with(index, walk, true);
}

/*
 * Whether the sleeping thread's stack is cached, by then in `seen`; otherwise `seen` is the entry to fill. Of stacks that
 * have the registers in common, all but the first one are in slots chosen by the words that differ.
 */
static __always_inline bool is_seen(struct walk *walk)
{
	struct seen_user_stack *other;
	u64 words;
	u32 slot;

	if (!has_same_registers(walk->seen, walk->process, walk->ip, walk->sp, walk->bp) || !walk->window_bytes)
		return false;
	words = other_words_in_window(walk->seen, walk->scratch, walk->sp, walk->window_bytes);
	if (!words)
		return true;
	slot = seen_slot(walk->ip, words) & (SEEN_USER_STACKS - 1);
	other = bpf_map_lookup_elem(&user_stack_by_seen_in_walks, &slot);
	if (!other)
		return false;
	walk->seen = other;
	return has_same_registers(other, walk->process, walk->ip, walk->sp, walk->bp) &&
	       !other_words_in_window(other, walk->scratch, walk->sp, walk->window_bytes);
}

/* Fills scratch->user, and `seen` with the words used, unless the stack of a sleeping thread is cached there. */
static __always_inline enum user_end unwind_user(struct task_struct *task, struct scratch *scratch, u32 process, struct seen_user_stack **seen,
						 bool is_own)
{
	const struct pt_regs *regs = (const struct pt_regs *)bpf_task_pt_regs(task);
	struct walk walk = {};

	scratch->user.length = 0;
	if (!bpf_core_field_exists(regs->ip) || (u16)regs->cs != X86_USER_CS)
		return USER_UNREADABLE;
	/* Before the loop over frames, to keep it short for the verifier. */
	if (own_namespace) {
		scratch->tgid = shown_process(task);
		scratch->tid = shown_number(task);
	}
	walk.task = task;
	walk.scratch = scratch;
	walk.ip = regs->ip;
	walk.sp = regs->sp;
	walk.bp = regs->bp;
	walk.process = process;
	walk.end = USER_PARTLY;
	walk.seen = *seen;
	walk.began_at = walk.sp;
	if (!is_own) {
		bool is_same;

		wait_until_responsive(task, walk.sp);
		/* User space would block too if it were asked about such memory. */
		if (fill_window(&walk, walk.sp, false) && walk.end == USER_UNREAD)
			return USER_UNREAD;
		is_same = is_seen(&walk);
		*seen = walk.seen;
		if (is_same)
			return USER_SEEN;
	}
	/* From `walk`: the registers of another thread may change, and the entry has to be of one stack. */
	begin_keeping(*seen, process, walk.ip, walk.sp, walk.bp);
	if (is_own)
		bpf_loop(MAX_FRAMES, step_of_own, &walk, 0);
	else
		bpf_loop(MAX_FRAMES, step, &walk, 0);
	scratch->user.length = walk.length;
	return walk.end;
}
