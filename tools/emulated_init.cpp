// The first process of an emulated machine, for tools/check_amx.sh: runs a command, prints its status, and turns the
// machine off. The kernel passes the end of its own command line as arguments; the command begins at the first argument
// that is an absolute path.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

namespace {

// Switch between threads of the command only if a thread waits or yields: never while it uses tiles, because the kernel
// does not save tiles here.
void switch_where_threads_wait() {
    const sched_param lowest{1};
    if (sched_setscheduler(0, SCHED_FIFO, &lowest) != 0) std::perror("sched_setscheduler"), _exit(127);
}

int status_of(char** command) {
    const pid_t child = fork();
    if (child == 0) {
        switch_where_threads_wait();
        execv(command[0], command);
        std::perror(command[0]);
        _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

int main(int, char** arguments) {
    char** command = arguments + 1;
    while (*command && **command != '/') ++command;
    if (!*command) return 2;
    mount("none", "/dev", "devtmpfs", 0, nullptr);
    const int console = open("/dev/console", O_RDWR);
    for (int file = 0; file < 3; ++file) dup2(console, file);
    std::printf("-- started\n");
    std::fflush(stdout);
    std::printf("-- ended with %d\n", status_of(command));
    std::fflush(stdout);
    sync();
    reboot(RB_POWER_OFF);
}
