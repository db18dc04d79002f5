// SPDX-License-Identifier: MIT OR Apache-2.0
// Processes that any user may start, and that would take an observer's memory, descriptors or time.
// usage: neighbors MODE ARGUMENTS...; each mode prints `ready` once it is set up.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef SYMBOL
#define SYMBOL "plain"
#endif

// The name of this function is the hostile one.
int waits(void) __asm__(SYMBOL);
__attribute__((noinline)) int waits(void)
{
	pause();
	return 1;
}

static void ready(void)
{
	puts("ready");
	fflush(stdout);
}

// COUNT files of code in DIRECTORY, each a copy of FROM, mapped once and closed.
static int map_files(const char *directory, int count, const char *from, char **at)
{
	static char code[65536], path[4200];
	int file = open(from, O_RDONLY);
	ssize_t bytes = read(file, code, sizeof(code));

	close(file);
	*at = mmap(NULL, count * 4096L, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (int i = 0; i < count; i++) {
		snprintf(path, sizeof(path), "%s/%05d", directory, i);
		file = open(path, O_CREAT | O_RDWR, 0755);
		if (file < 0 || write(file, code, bytes) != bytes)
			return 1;
		if (mmap(*at + i * 4096L, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED)
			return 1;
		close(file);
	}
	return 0;
}

// files DIRECTORY COUNT
static int files(char **words)
{
	char *at;

	if (map_files(words[0], atoi(words[1]), "/bin/true", &at))
		return 1;
	ready();
	for (;;)
		usleep(20000);
}

// mappings DIRECTORY COUNT: of one file whose path is as long as a path can be.
static int mappings(char **words)
{
	static char part[201];
	int count = atoi(words[1]);
	char *at = mmap(NULL, count * 4096L, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int file;

	memset(part, 'd', 200);
	if (chdir(words[0]))
		return 1;
	for (int depth = 0; depth < 18; depth++)
		if (mkdir(part, 0755) || chdir(part))
			return 1;
	file = open("code", O_CREAT | O_RDWR, 0755);
	if (file < 0 || ftruncate(file, 4096))
		return 1;
	// Neighbors that begin at the same offset stay two mappings.
	for (int i = 0; i < count; i++)
		if (mmap(at + i * 4096L, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED)
			return 1;
	ready();
	for (;;)
		usleep(20000);
}

// perf-map BYTES short|long: code generated at run time, and a list of its names.
static int perf_map(char **words)
{
	static const unsigned char nap[] = { 0xb8, 35, 0, 0, 0, 0x31, 0xf6, 0x0f, 0x05, 0xc3 };
	const struct timespec pause = { 0, 20000000 };
	char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char path[64];
	long bytes = atol(words[0]), written = 0;
	FILE *list;

	memcpy(page, nap, sizeof(nap));
	snprintf(path, sizeof(path), "/tmp/perf-%d.map", getpid());
	list = fopen(path, "w");
	if (!list)
		return 1;
	// An outdated name of the same code; the last line is the valid one.
	fprintf(list, "%lx 1000 name_of_freed_code\n", (long)page);
	for (long i = 0; written < bytes; i++)
		written += words[1][0] == 's' ? fprintf(list, "0 0 a\n") :
			fprintf(list, "%lx 1a0 LazyCompile:*handleRequest%ld /srv/app/lib/handler.js:%ld:17\n",
				0x7f1200000000 + i * 0x200, i, i % 4000);
	fprintf(list, "%lx 40 name_of_live_code\n", (long)page);
	fclose(list);
	ready();
	for (;;)
		((void (*)(const struct timespec *))page)(&pause);
}

// links DIRECTORY TARGET: at the first open of a mapped file all of them become links to TARGET.
static int links(char **words)
{
	enum { COUNT = 600 };
	char path[4200], *at;
	int watch;

	if (chdir(words[0]) || mkdir("now", 0755) || mkdir("then", 0755))
		return 1;
	if (map_files("now", COUNT, "/bin/true", &at))
		return 1;
	for (int i = 0; i < COUNT; i++) {
		snprintf(path, sizeof(path), "then/%05d", i);
		if (symlink(words[1], path))
			return 1;
	}
	// The user cannot open it.
	if (open(words[1], O_RDONLY | O_NONBLOCK) >= 0 || errno != EACCES)
		return 1;
	watch = inotify_init1(0);
	inotify_add_watch(watch, "now", IN_OPEN);
	ready();
	if (read(watch, path, sizeof(path)) > 0) {
		munmap(at, COUNT * 4096L);
		renameat2(AT_FDCWD, "now", AT_FDCWD, "then", RENAME_EXCHANGE);
	}
	for (;;)
		pause();
}

// readers FILE COUNT NAME: each is a process of its own that reads one page; the last has NAME, and reads 50.
static int readers(char **words)
{
	int count = atoi(words[1]);

	for (int i = 1; i <= count; i++) {
		int status;
		pid_t child = fork();

		if (child == 0) {
			int file = open(words[0], O_RDONLY | O_DIRECT);
			void *page;

			if (i == count)
				prctl(PR_SET_NAME, words[2]);
			if (file < 0 || posix_memalign(&page, 4096, 4096))
				_exit(1);
			for (int read = 0; read < (i == count ? 50 : 1); read++)
				if (pread(file, page, 4096, 4096L * read) != 4096)
					_exit(1);
			_exit(0);
		}
		if (child < 0 || waitpid(child, &status, 0) != child || status)
			return 1;
	}
	ready();
	return 0;
}

static void *naps(void *us)
{
	for (;;)
		usleep((long)us);
	return NULL;
}

// threads COUNT US: each sleeps for US microseconds, again and again.
static int threads(char **words)
{
	pthread_attr_t small;
	pthread_t thread;

	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 65536);
	for (int i = atoi(words[0]); i > 0; i--)
		if (pthread_create(&thread, &small, naps, (void *)atol(words[1])))
			return 1;
	ready();
	for (;;)
		pause();
}

// busy: on-CPU for 4 of 5 ms, until it is killed.
__attribute__((noreturn)) static int busy(char **words)
{
	struct timespec now, until;
	const struct timespec pause = { 0, 1000000 };

	(void)words;
	ready();
	for (;;) {
		clock_gettime(CLOCK_MONOTONIC, &until);
		until.tv_nsec += 4000000;
		do
			clock_gettime(CLOCK_MONOTONIC, &now);
		while ((now.tv_sec - until.tv_sec) * 1000000000 + now.tv_nsec < until.tv_nsec);
		nanosleep(&pause, NULL);
	}
}

// symbol: waits in the function with the hostile name.
static int symbol(char **words)
{
	(void)words;
	ready();
	return waits();
}

int main(int count, char **words)
{
	static const struct {
		const char *name;
		int arguments;
		int (*run)(char **);
	} modes[] = {
		{ "files", 2, files },   { "mappings", 2, mappings }, { "perf-map", 2, perf_map }, { "links", 2, links },
		{ "readers", 3, readers }, { "threads", 2, threads },   { "busy", 0, busy },         { "symbol", 0, symbol },
	};

	for (size_t mode = 0; mode < sizeof(modes) / sizeof(modes[0]); mode++)
		if (count >= 2 && strcmp(words[1], modes[mode].name) == 0 && count == 2 + modes[mode].arguments)
			return modes[mode].run(words + 2);
	return 2;
}
