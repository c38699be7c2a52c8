def write_atomically(path, data):
    open(path,"wb").write(data)
