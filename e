error: cannot read the job file 'job.toml': No such file or directory
