output "nodes" {
  description = "Every host by its name: role, addresses, RDMA devices, GPUs, shape."
  value       = module.cluster.nodes
}

output "inventory" {
  description = "What Ansible reads: groups, hosts and each host's variables."
  value       = module.cluster.inventory
}

output "ingress_addresses" {
  description = "Public addresses of the ingress hosts."
  value       = module.cluster.ingress_addresses
}

output "hourly_cost" {
  description = "US dollars per hour: `known` is the sum over the shapes with a price, `without_price` lists the others, `figures` says what each figure is, of which day and from where."
  value       = module.cluster.hourly_cost
}

output "weights_mount" {
  description = "Where hosts mount the shared weights (DNS name and mount name of the file system); null: none."
  value       = module.cluster.weights_mount
}
